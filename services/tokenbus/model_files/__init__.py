"""A model's folder, as Hugging Face's tools write it: its tokenizer and its chat template."""

from tokenbus.model_files.chat_template import ChatTemplate, ChatTemplateError, ModelFilesError
from tokenbus.model_files.tokenizer import ModelTokenizer

__all__ = ["ChatTemplate", "ChatTemplateError", "ModelFilesError", "ModelTokenizer"]
