"""Help for sources that are Hugging Face datasets."""
