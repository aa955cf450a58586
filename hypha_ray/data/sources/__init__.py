"""Sources of datasets: files, tables, hub datasets and generated problems, as documents or as prompts."""
