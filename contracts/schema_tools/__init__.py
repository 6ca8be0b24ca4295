"""What a developer of the schema runs: generate the code, check it, write the vectors and the baseline."""
