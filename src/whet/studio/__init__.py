"""The page of `whet studio`: a form over a config, its checks, and buttons that start runs of it."""
