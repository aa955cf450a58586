"""Summary of a job at the head of its dry run and of its start: model, data, rounds, traffic, disk, time and cost."""
