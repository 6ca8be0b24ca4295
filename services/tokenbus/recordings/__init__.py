"""Recorded streams: their items, Parquet files of them, and the durable log."""
