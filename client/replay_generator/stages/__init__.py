"""Who works between two tables: a stage of a user's own, and the one that gives groups their rewards."""
