"""The archive: rows and files of items, and a process that writes what passed through a server into them."""
