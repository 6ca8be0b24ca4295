"""The schema for other tools: .proto files, descriptors, JSON Schema, AsyncAPI, and comparisons of versions."""
