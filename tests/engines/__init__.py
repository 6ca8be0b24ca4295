"""The engines, each against what it must compute."""
