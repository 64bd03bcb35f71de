"""The process where jobs and training meet."""
