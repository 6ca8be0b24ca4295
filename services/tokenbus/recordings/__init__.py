"""Recordings of workers' streams: items, Parquet files and the durable log."""
