"""This tree's codec and bus beside another revision's."""
