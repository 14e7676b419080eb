//! OpenAI types
