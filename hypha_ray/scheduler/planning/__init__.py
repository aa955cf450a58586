"""Planning: batches, samples and slices of each worker's next round."""
