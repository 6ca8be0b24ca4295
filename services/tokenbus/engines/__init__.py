"""Engines that a worker runs, found by name, and the FastDeploy drop-in."""
