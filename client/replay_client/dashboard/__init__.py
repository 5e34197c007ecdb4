"""The page: a live buffer in a browser. A client like any other, in a process of its own, that only reads.

server ──server_info──▶ Live ──┐
       ──list_items──▶ Catalog ┼──▶ app (Starlette) ──JSON, server-sent events──▶ page/ (ES modules)
       ──get─────────▶ groups ─┘
metrics.jsonl ───────▶ Runs

Invariants:

* However many people look, the server answers one poller. `Budget` bounds the time that it works for the page.
* The page changes nothing: no method of the client that writes is called here.
* Text out of groups is data. It travels as JSON and is shown by `textContent` alone.
"""
