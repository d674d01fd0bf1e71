"""A language model's opinion on failures that the rules do not know; off unless `llm` is set.

The rules' verdict is the floor: the model is asked only where they say UNKNOWN, sees a redacted excerpt, answers in a
strict form, and where it fails, or does not show the line it means, UNKNOWN stays.
"""

from nvrx_slurm.attribution.second_opinion.opinion import SecondOpinion

__all__ = ["SecondOpinion"]
