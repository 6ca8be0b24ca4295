"""The golden messages: what they are is written down here by hand, with the generated classes alone.

Nothing of the codec is used, so that the codec can be held against them.
"""
