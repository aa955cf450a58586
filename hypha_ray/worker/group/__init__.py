"""Workers of several processes: a batch is shared between them, and the rest of the run sees one worker."""
