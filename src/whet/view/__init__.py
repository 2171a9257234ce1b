"""`whet view`: pages in the browser that show runs, from their directories alone."""
