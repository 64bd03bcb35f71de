"""inline::localfs: data sets from rows, data URIs and files under allowed roots."""
