"""Recordings of worker streams: items, Parquet files, sessions and the durable log."""
