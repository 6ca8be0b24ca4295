"""The schema as other tools read it: .proto files, descriptors, JSON Schema, AsyncAPI, and what a change breaks."""
