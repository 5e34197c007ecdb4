"""The page of `replay dashboard`: a live buffer in a browser. Its process is a client that only reads.

server ──server_info──▶ Live ──┐
       ──list_items──▶ Catalog ┼──▶ app (Starlette) ──JSON, server-sent events──▶ page/ (ES modules)
       ──get─────────▶ groups ─┘
metrics.jsonl ───────▶ Runs

Invariants:

* One poller asks the server, however many viewers there are. `Budget` bounds the server's work for the page.
* The page changes nothing: this package calls only methods of the client that read.
* Text of groups is data, never markup. It travels as JSON, and the page shows it by `textContent` alone.
"""
