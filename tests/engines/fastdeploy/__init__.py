"""Tests of the drop-in for FastDeploy."""
