"""Users' code: calls functions of users so that none of them can end the process, or block the process unnoticed."""
