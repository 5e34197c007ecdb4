"""The page of `replay dashboard`: it shows a running server in a browser. Its process is a client that only reads.

server ──server_info──▶ Live ──┐
       ──list_items──▶ Catalog ┼──▶ app (Starlette) ──JSON, server-sent events──▶ page/ (ES modules)
       ──get─────────▶ groups ─┘
metrics.jsonl ───────▶ Runs

Invariants:

* One poller asks the server, however many viewers there are. `Budget` bounds the server's work for the page.
* The page changes nothing on the server: this package calls only methods of the client that read.
* Text of groups is data, never markup. It is sent as JSON, and the page shows it by `textContent` alone.
"""
