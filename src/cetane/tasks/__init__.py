"""Tasks: pieces of work named by content, performed by processes here or by Dask's workers."""
