"""Places that are not on this machine: object stores, HDFS, the Hugging Face hub."""
