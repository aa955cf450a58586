"""Tables of a job file by topic; the others are in `schema`."""
