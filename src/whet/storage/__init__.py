"""Remote storage: object stores, HDFS, the Hugging Face hub."""
