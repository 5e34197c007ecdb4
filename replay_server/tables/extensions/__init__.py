"""Extensions: what is laid on the tables, and of which the tables know nothing."""
