"""The parts of `tokenbus bench`: which benchmarks there are, how one runs, and the page that shows what they found."""
