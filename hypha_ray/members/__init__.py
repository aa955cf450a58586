"""Built-in members of families that a plain run never meets; a job names one, and the tables of families load it."""
