"""Prompts: rows of files and data sets, messages, the queue of prompts, and the table of prompts."""
