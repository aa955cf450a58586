"""Checks before a start, of settings, dataset, model and machine; advice on settings; and the summary of a job."""
