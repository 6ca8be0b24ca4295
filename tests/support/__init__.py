"""What tests of every folder share: waits that end, and a clock that a test moves."""
