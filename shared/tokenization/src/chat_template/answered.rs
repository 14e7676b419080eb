//! The end of a prompt, behind an answer that the model sampled.
//!
//! A model's own words must keep the tokens that it sampled: a text may have several spellings in tokens, and
//! training on others than those that were sampled is training on what never happened. So the prompt of the next turn
//! is not rendered anew. It is the tokens so far, and behind them what the template writes from the end of the answer
//! on.

use std::ops::Range;

use minijinja::value::{Value, ValueKind};

use super::ChatTemplate;
use super::chat_input::ChatInput;
use super::roles::lost_role;
use super::template_input::{REASONING, pairs, unused_character};
use crate::{TokenId, TokenizationError, Tokenizer};

/// An answer among the messages of a chat whose tokens are known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SampledAnswer {
    /// Its place among the messages.
    pub message: usize,
    /// The token that ended it, if it ended by one.
    pub end: Option<TokenId>,
}

/// A rendered text from the end of the answer on.
struct Rest {
    text: String,
    /// The character that is inside special tokens which a user wrote.
    guard: Option<char>,
    /// The special tokens of the template.
    specials: Vec<Range<usize>>,
}

impl ChatTemplate {
    /// The tokens of a chat behind a sampled answer: the rest of what ends it, the messages after it, and the
    /// beginning of the next answer if `open_answer`. `None` if the template does not tell where the answer ends.
    ///
    /// The answer is rendered with a mark for its text, once with the messages after it and once as the last one.
    /// Both have the end of the answer behind the mark, up to the last special token of the second. An answer that
    /// ended by a token has it already, even where the template would have written another one.
    ///
    /// # Errors
    /// As [`ChatTemplate::encode_within`].
    pub fn encode_behind(
        &self,
        tokenizer: &Tokenizer,
        input: &ChatInput,
        answer: SampledAnswer,
        open_answer: bool,
        tokens_max: usize,
    ) -> Result<Option<Vec<TokenId>>, TokenizationError> {
        let mark = unused_character(input.values())?;
        for marked in marked(input, answer.message, mark) {
            let rest = self.rest(tokenizer, &marked.input, mark, open_answer);
            // Some templates write a new system message at the beginning of the prompt.
            let Some(rest) = rest.filter(|rest| rest.has_all(&input.behind(answer.message))) else {
                continue;
            };
            // Some templates refuse a chat that ends with this answer, but not a short one.
            let whole = marked.input.first(answer.message + 1);
            let short = marked.input.only(answer.message);
            let alone = [whole, short].into_iter();
            let from = alone
                .filter_map(|alone| self.rest(tokenizer, &alone, mark, false))
                .find_map(|closing| rest.behind_answer(&closing, tokenizer, answer.end, &marked));
            if let Some((from, is_known)) = from {
                return rest.encode(tokenizer, from, is_known, tokens_max).map(Some);
            }
        }
        Ok(None)
    }

    /// The rendered text behind the mark. `None` if the template refuses the chat, or leaves the mark out.
    fn rest(
        &self,
        tokenizer: &Tokenizer,
        input: &ChatInput,
        mark: char,
        open_answer: bool,
    ) -> Option<Rest> {
        let rendered = self.in_shapes(input, |variables| {
            self.render_guarded(tokenizer, variables, open_answer)
        });
        let (text, guard) = rendered.ok()?;
        let at = text.rfind(mark)?;
        let text = text[at + mark.len_utf8()..].to_owned();
        let specials = tokenizer.special_ranges(&text);
        Some(Rest {
            text,
            guard,
            specials,
        })
    }
}

impl Rest {
    /// Whether it has the texts of these messages.
    fn has_all(&self, messages: &Value) -> bool {
        let unguarded: String;
        let text = match self.guard {
            None => &self.text,
            Some(guard) => {
                unguarded = self.text.chars().filter(|one| *one != guard).collect();
                &unguarded
            }
        };
        lost_role(messages, text).is_none()
    }

    /// The place in the text from which on the tokens are missing. With `true` the special token in that place is
    /// there already. `closing` is the rest of a chat that ends with the answer.
    fn behind_answer(
        &self,
        closing: &Rest,
        tokenizer: &Tokenizer,
        end: Option<TokenId>,
        marked: &Marked,
    ) -> Option<(usize, bool)> {
        let Some(last) = closing.specials.len().checked_sub(1) else {
            // Nothing ends an answer but the head of the next message.
            let head = self.specials.first().filter(|head| {
                let token = tokenizer.token_id(&self.text[(*head).clone()]);
                self.text[..head.start].trim().is_empty() && token.is_some() && token == end
            });
            return match head {
                Some(head) => Some((head.start, true)),
                None => marked.is_text_alone.then_some((0, false)),
            };
        };
        let (ours, theirs) = (self.specials.get(last)?, &closing.specials[last]);
        let is_last = closing.text[theirs.end..].trim().is_empty();
        if !is_last || self.text[..ours.start] != closing.text[..theirs.start] {
            return None;
        }
        // gpt-oss ends the last answer by another token than those before. A template may also write a token behind
        // the whole chat, and then this one begins the next message, whose role or text follows it.
        let is_same = self.text[ours.clone()] == closing.text[theirs.clone()];
        let next = self.specials.get(last + 1);
        let is_alone = next.is_some_and(|next| self.text[ours.end..next.start].trim().is_empty());
        if !is_same && !is_alone {
            return None;
        }
        Some(match (end, marked.is_text_alone) {
            (Some(_), _) => (ours.start, true),
            (None, true) => (0, false),
            (None, false) => (ours.start, false),
        })
    }

    /// The tokens from a place on. With `true` the first one, which is special, is left out: it was encoded for the
    /// rules of tokenizers about the beginning of a text.
    fn encode(
        &self,
        tokenizer: &Tokenizer,
        from: usize,
        is_known: bool,
        tokens_max: usize,
    ) -> Result<Vec<TokenId>, TokenizationError> {
        let mut tokens = tokenizer.encode_rendered(
            &self.text[from..],
            self.guard,
            tokens_max.saturating_add(1),
        )?;
        if is_known {
            tokens.remove(0);
        }
        Ok(tokens)
    }
}

/// A chat with a mark in an answer.
struct Marked {
    input: ChatInput,
    /// Whether the template has nothing of the answer to write behind the mark but its end.
    is_text_alone: bool,
}

/// The chat with a mark for the text of an answer, and with one in its last call, if it has any. Templates may leave
/// out the text of an answer that has calls. Its reasoning is left out, since some write it only for the last answer.
fn marked(input: &ChatInput, place: usize, mark: char) -> Vec<Marked> {
    let Some(answer) = input.messages.0.get(place) else {
        return Vec::new();
    };
    let mut fields = pairs(answer);
    fields.retain(|(name, _)| !name.as_str().is_some_and(|name| REASONING.contains(&name)));
    let is_field = |name: &str, field: &Value| field.as_str() == Some(name);
    let calls = fields.iter().find(|(name, _)| is_field("tool_calls", name));
    let calls: Vec<Value> = calls
        .filter(|(_, calls)| calls.kind() == ValueKind::Seq)
        .and_then(|(_, calls)| calls.try_iter().ok())
        .into_iter()
        .flatten()
        .collect();
    let replaced = |fields: &[(Value, Value)], field: &str, value: Value| {
        let mut fields = fields.to_vec();
        fields.retain(|(name, _)| !is_field(field, name));
        fields.push((Value::from(field), value));
        fields
    };
    let with_answer = |fields, is_text_alone| {
        let mut input = input.clone();
        input.messages.0[place] = Value::from_pairs(fields);
        Marked {
            input,
            is_text_alone,
        }
    };
    let text = replaced(&fields, "content", Value::from(mark.to_string()));
    let mut all = vec![with_answer(text, calls.is_empty())];
    if let Some((last, before)) = calls.split_last() {
        let function = pairs(&last.get_attr("function").unwrap_or_default());
        let arguments = Value::from(format!("{{\"mark\":\"{mark}\"}}"));
        let function = replaced(&function, "arguments", arguments);
        let call = replaced(&pairs(last), "function", Value::from_pairs(function));
        let calls = before.iter().cloned().chain([Value::from_pairs(call)]);
        let calls = replaced(&fields, "tool_calls", calls.collect());
        all.push(with_answer(
            replaced(&calls, "content", Value::from("")),
            false,
        ));
    }
    all
}

#[cfg(test)]
mod tests {
    use super::super::tests::{input, template};
    use super::*;
    use crate::testing::{IM_END, byte_level_files};

    const THINKING: &str = "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and loop.last \
        %}<think>{{ m.reasoning_content or '' }}</think>{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}\
        {% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";

    /// The text behind the second message.
    fn behind(source: &str, messages: &str, end: Option<TokenId>) -> Option<String> {
        let tokenizer = byte_level_files().tokenizer().unwrap();
        let input = input(&format!(r#"{{"messages": {messages}}}"#));
        let answer = SampledAnswer { message: 1, end };
        let ids = template(source)
            .encode_behind(&tokenizer, &input, answer, true, usize::MAX)
            .unwrap()?;
        let bytes = ids.iter().flat_map(|id| tokenizer.token_bytes(*id));
        Some(String::from_utf8(bytes.copied().collect()).unwrap())
    }

    #[test]
    fn what_ended_an_answer_is_not_repeated_and_not_missing() {
        let chat = r#"[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "reasoning": "c"},
            {"role": "user", "content": "<|im_end|>d"}]"#;
        let rest = "\n<|im_start|>user\n<|im_end|>d<|im_end|>\n<|im_start|>assistant\n";
        assert_eq!(behind(THINKING, chat, Some(IM_END)).as_deref(), Some(rest));
        let cut = format!("<|im_end|>{rest}");
        assert_eq!(behind(THINKING, chat, None), Some(cut));
    }

    #[test]
    fn a_marker_that_a_user_wrote_is_no_token() {
        let tokenizer = byte_level_files().tokenizer().unwrap();
        let chat = input(
            r#"{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"},
                {"role": "user", "content": "<|im_end|>"}]}"#,
        );
        let answer = SampledAnswer {
            message: 1,
            end: Some(IM_END),
        };
        let ids = template(THINKING).encode_behind(&tokenizer, &chat, answer, false, usize::MAX);
        let ids = ids.unwrap().unwrap();
        let ends = ids.iter().filter(|id| **id == IM_END).count();
        assert_eq!(ends, 1);
    }

    #[test]
    fn the_head_of_the_next_message_may_be_what_ended_an_answer() {
        let heads = "{% for m in messages %}<|im_start|>{{ m.content }}{% endfor %}<|endoftext|>";
        let chat = r#"[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"},
            {"role": "user", "content": "c"}]"#;
        let start = byte_level_files()
            .tokenizer()
            .unwrap()
            .token_id("<|im_start|>");
        assert_eq!(
            behind(heads, chat, start),
            None,
            "a chat ends with a token of its own"
        );
        let heads = heads.replace("<|endoftext|>", "");
        assert_eq!(behind(&heads, chat, start).as_deref(), Some("c"));
        assert_eq!(behind(&heads, chat, None).as_deref(), Some("<|im_start|>c"));
    }

    #[test]
    fn nothing_follows_where_a_new_message_goes_to_the_beginning() {
        let front = "{% for m in messages if m.role == 'system' %}{{ m.content }}{% endfor %}\
            {% for m in messages if m.role != 'system' %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}";
        let chat = r#"[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"},
            {"role": "system", "content": "obey"}, {"role": "user", "content": "c"}]"#;
        assert_eq!(behind(front, chat, Some(IM_END)), None);
    }
}
