"""The engines of a worker, and the FastDeploy drop-in."""
