//! Renders chats by templates, for the comparison with transformers (`tests/templates/run`).
//!
//! Each line of standard input has a template, a tokenizer and chats. The answer is a line with, for each chat, the
//! prompt's text and token ids, or the error. Where a chat names an answer as sampled, there is also what the prompt
//! has behind it: with a token that ended it, and without.

use std::io::{BufRead as _, Write as _};

use refrain_tokenization::{
    ChatInput, ChatTemplate, JsonList, JsonMap, ModelFiles, SampledAnswer, TokenId,
    TokenizationError, Tokenizer,
};
use serde::Deserialize;
use serde_json::{Value, json};

#[derive(Deserialize)]
struct Job {
    template: String,
    tokenizer: String,
    tokenizer_config: Value,
    chats: Vec<Chat>,
}

#[derive(Deserialize)]
struct Chat {
    messages: JsonList,
    tools: Option<JsonList>,
    kwargs: JsonMap,
    add_generation_prompt: bool,
    /// The place of an answer that was sampled.
    answered: Option<usize>,
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut out = std::io::stdout().lock();
    for line in std::io::stdin().lock().lines() {
        let job: Job = serde_json::from_str(&line?)?;
        let files = ModelFiles {
            tokenizer_json: job.tokenizer.into_bytes(),
            tokenizer_config_json: Some(job.tokenizer_config.to_string().into_bytes()),
            chat_template: Some(job.template.into()),
            ..ModelFiles::default()
        };
        let (template, tokenizer) = (files.chat_template(), files.tokenizer());
        let answers: Vec<Value> = job
            .chats
            .into_iter()
            .map(|chat| {
                let rendered = match (&template, &tokenizer) {
                    (Ok(Some(template)), Ok(tokenizer)) => render(template, tokenizer, chat),
                    (Ok(None), _) => Ok(Value::Null),
                    (Err(error), _) | (_, Err(error)) => return json!({"error": error.to_string()}),
                };
                rendered.unwrap_or_else(|error| json!({"error": error.to_string()}))
            })
            .collect();
        writeln!(out, "{}", Value::from(answers))?;
    }
    Ok(())
}

fn render(
    template: &ChatTemplate,
    tokenizer: &Tokenizer,
    chat: Chat,
) -> Result<Value, TokenizationError> {
    let input = ChatInput::new(chat.messages, chat.tools, Some(chat.kwargs));
    let opens = chat.add_generation_prompt;
    let mut answer = shown(
        tokenizer,
        template.encode_within(tokenizer, &input, opens, usize::MAX)?,
    );
    if let Some(message) = chat.answered {
        let behind = |end| {
            let sampled = SampledAnswer { message, end };
            let behind = template.encode_behind(tokenizer, &input, sampled, opens, usize::MAX)?;
            Ok(behind.map(|ids| shown(tokenizer, ids)))
        };
        let end = tokenizer.token_id("<eos>");
        answer["behind"] = json!([behind(end)?, behind(None)?]);
    }
    Ok(answer)
}

fn shown(tokenizer: &Tokenizer, ids: Vec<TokenId>) -> Value {
    let bytes: Vec<u8> = ids
        .iter()
        .flat_map(|id| tokenizer.token_bytes(*id).to_vec())
        .collect();
    json!({"text": String::from_utf8_lossy(&bytes), "ids": ids})
}
