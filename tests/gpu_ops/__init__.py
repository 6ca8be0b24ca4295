"""Tests of tokenbus_gpu_ops."""
