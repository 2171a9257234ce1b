"""Parts of a run in separate processes, on this machine or many, with Ray. Only this package imports Ray.

The loop stays in the process that was started. No process outlives the run: a cluster that was started here ends with
this process, however it ends, and an actor in a foreign cluster ends when the driver has ended.

This module imports nothing: an actor that only carries messages (`lines.RemoteEnd`) starts without torch.
"""
