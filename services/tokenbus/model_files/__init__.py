"""The tokenizer and the chat template in a model's folder, in the format of Hugging Face's tools."""

from tokenbus.model_files.chat_template import ChatTemplate, ChatTemplateError, ModelFilesError
from tokenbus.model_files.tokenizer import ModelTokenizer

__all__ = ["ChatTemplate", "ChatTemplateError", "ModelFilesError", "ModelTokenizer"]
