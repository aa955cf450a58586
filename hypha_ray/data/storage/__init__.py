"""Storage of prepared datasets: folders, URLs, and a cache on disk."""
