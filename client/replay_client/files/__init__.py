"""Files: what the rows of data sets and JSON lines hold."""
