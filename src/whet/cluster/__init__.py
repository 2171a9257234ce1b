"""Parts of a run in processes of their own, on this machine or many, by Ray. The only package that imports it.

The loop stays in the process that was started. Nothing outlives the run: a cluster that was started here goes down with
this process, whatever ends it, and an actor in a foreign cluster ends when the driver is gone.

Nothing is imported here: an actor that only carries messages (`lines.Host`) starts without torch.
"""
