"""The gateway: OpenAI's API over HTTP in front of the processor, and the inspector's page."""
