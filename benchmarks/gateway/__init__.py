"""The gateway end to end, with 256 streams: what logprobs cost there, and how long a row takes to its socket."""
