#include "text/spm.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <queue>
#include <utility>

namespace fourfold::text {
namespace {

constexpr std::string_view kSpace = "\xe2\x96\x81";  // U+2581, what SentencePiece writes for a space

// A multiplicative hash over eight bytes at a time; only ever compared within one process.
uint64_t hash(std::string_view text) {
  constexpr uint64_t kOdd = 0x9e3779b97f4a7c15;
  uint64_t h = text.size() * kOdd;
  const char* p = text.data();
  size_t left = text.size();
  for (; left >= 8; left -= 8, p += 8) {
    uint64_t word;
    std::memcpy(&word, p, 8);
    h = (std::rotl(h, 29) ^ word) * kOdd;
  }
  uint64_t word = 0;
  if (left > 0) std::memcpy(&word, p, left);
  h = (std::rotl(h, 29) ^ word) * kOdd;
  return h ^ (h >> 32);
}

size_t utf8_length(uint8_t lead) {
  if (lead < 0x80) return 1;
  if (lead < 0xe0) return 2;
  return lead < 0xf0 ? 3 : 4;
}

bool is_space(char c) { return c == ' ' || (c >= '\t' && c <= '\r'); }

// "<0xAB>" → 0xAB, or -1.
int parse_byte_token(std::string_view text) {
  if (text.size() != 6 || text.substr(0, 3) != "<0x" || text[5] != '>') return -1;
  int value = 0;
  for (char c : text.substr(3, 2)) {
    int digit;
    if (c >= '0' && c <= '9') {
      digit = c - '0';
    } else if (c >= 'A' && c <= 'F') {
      digit = c - 'A' + 10;
    } else if (c >= 'a' && c <= 'f') {
      digit = c - 'a' + 10;
    } else {
      return -1;
    }
    value = value * 16 + digit;
  }
  return value;
}

struct Symbol {
  int32_t prev;
  int32_t next;
  uint32_t start;
  uint32_t length;  // 0 once it was merged into its left neighbour
  int32_t id;       // -1: no token has this text
};

struct Pair {
  float score;
  int32_t left;
  int32_t right;
  uint32_t length;  // of both together when the pair was found; differs if one of them has grown since
  int32_t id;

  bool operator<(const Pair& other) const {
    return score < other.score || (score == other.score && left > other.left);
  }
};

}  // namespace

void TokenTexts::reserve(size_t tokens, size_t bytes) {
  offset_.reserve(tokens + 1);
  bytes_.reserve(bytes);
}

void TokenTexts::add(std::string_view text) {
  bytes_.append(text);
  offset_.push_back(bytes_.size());
}

SpecialTrie::SpecialTrie() : nodes_(1) { std::fill(std::begin(root_), std::end(root_), -1); }

void SpecialTrie::add(std::string_view text, int32_t token) {
  int32_t node = 0;
  for (char c : text) {
    const auto byte = static_cast<uint8_t>(c);
    int32_t next = child(node, byte);
    if (next < 0) {
      next = static_cast<int32_t>(nodes_.size());
      Node made;
      made.byte = byte;
      if (node == 0) {
        root_[byte] = next;
      } else {
        made.next = std::exchange(nodes_[node].first, next);
      }
      nodes_.push_back(made);
    }
    node = next;
  }
  if (node != 0) nodes_[node].token = token;
}

SpmTokenizer::SpmTokenizer(TokenTexts texts, std::vector<float> scores, std::vector<TokenType> types,
                           int32_t unknown_id, bool add_space_prefix, const std::vector<int32_t>& strip_after)
    : texts_(std::move(texts)),
      scores_(std::move(scores)),
      types_(std::move(types)),
      strip_after_(texts_.size(), false),
      unknown_id_(unknown_id),
      add_space_prefix_(add_space_prefix) {
  const size_t count = texts_.size();
  for (int32_t id : strip_after) strip_after_[id] = true;
  std::fill(std::begin(byte_id_), std::end(byte_id_), -1);
  slots_.assign(std::bit_ceil(2 * count + 1), Slot{0, -1});
  slot_mask_ = slots_.size() - 1;
  for (size_t i = 0; i < count; ++i) {
    const std::string_view text = texts_[i];
    const auto id = static_cast<int32_t>(i);
    switch (types_[i]) {
      case TokenType::kByte:
        if (const int byte = parse_byte_token(text); byte >= 0) byte_id_[byte] = id;
        continue;
      case TokenType::kUnused: continue;
      case TokenType::kControl:
      case TokenType::kUnknown: special_.add(text, id); continue;
      case TokenType::kUserDefined: special_.add(text, id); break;
      default: break;
    }
    if (text.empty()) continue;
    longest_ = std::max(longest_, text.size());
    const uint64_t h = hash(text);
    const auto tag = static_cast<uint32_t>(h >> 32);
    size_t slot = h & slot_mask_;
    // The last of two equal texts wins, as in a dictionary filled in order.
    while (slots_[slot].id >= 0 && !(slots_[slot].tag == tag && texts_[slots_[slot].id] == text)) {
      slot = (slot + 1) & slot_mask_;
    }
    slots_[slot] = {tag, id};
  }
}

int32_t SpmTokenizer::find(std::string_view text) const {
  if (text.size() > longest_) return -1;
  const uint64_t h = hash(text);
  const auto tag = static_cast<uint32_t>(h >> 32);
  for (size_t slot = h & slot_mask_; slots_[slot].id >= 0; slot = (slot + 1) & slot_mask_) {
    if (slots_[slot].tag == tag && texts_[slots_[slot].id] == text) return slots_[slot].id;
  }
  return -1;
}

void SpmTokenizer::encode(std::string_view text, bool parse_special, std::vector<int32_t>& ids) const {
  const auto allowed = [&](int32_t token) {
    return parse_special || types_[token] == TokenType::kUserDefined;
  };
  bool after_special = true;
  size_t start = 0;
  size_t at = 0;
  const auto flush = [&] {
    if (at == start) return;
    merge(text.substr(start, at - start), add_space_prefix_ && after_special, ids);
    after_special = false;
  };
  while (at < text.size()) {
    const SpecialTrie::Match match = special_.longest(text.substr(at), allowed);
    if (match.token < 0) {
      ++at;
      continue;
    }
    flush();
    ids.push_back(match.token);
    after_special = true;
    at += match.length;
    if (strip_after_[match.token]) {
      while (at < text.size() && is_space(text[at])) ++at;
    }
    start = at;
  }
  flush();
}

void SpmTokenizer::merge(std::string_view text, bool space_prefix, std::vector<int32_t>& ids) const {
  std::string escaped;
  escaped.reserve(text.size() + text.size() / 2 + 3);
  if (space_prefix) escaped.append(kSpace);
  for (char c : text) {
    if (c == ' ') {
      escaped.append(kSpace);
    } else {
      escaped.push_back(c);
    }
  }

  std::vector<Symbol> symbols;
  symbols.reserve(escaped.size());
  for (size_t at = 0; at < escaped.size();) {
    const size_t length = std::min(utf8_length(static_cast<uint8_t>(escaped[at])), escaped.size() - at);
    const auto index = static_cast<int32_t>(symbols.size());
    symbols.push_back({index - 1, index + 1, static_cast<uint32_t>(at), static_cast<uint32_t>(length),
                       find(std::string_view(escaped).substr(at, length))});
    at += length;
  }
  if (symbols.empty()) return;
  symbols.back().next = -1;

  std::vector<Pair> storage;
  storage.reserve(symbols.size());
  std::priority_queue<Pair> pairs(std::less<Pair>(), std::move(storage));
  const auto offer = [&](int32_t left, int32_t right) {
    if (left < 0 || right < 0) return;
    const uint32_t length = symbols[left].length + symbols[right].length;
    const int32_t id = find(std::string_view(escaped).substr(symbols[left].start, length));
    if (id >= 0) pairs.push({scores_[id], left, right, length, id});
  };
  for (size_t i = 1; i < symbols.size(); ++i) {
    offer(static_cast<int32_t>(i) - 1, static_cast<int32_t>(i));
  }
  while (!pairs.empty()) {
    const Pair pair = pairs.top();
    pairs.pop();
    Symbol& left = symbols[pair.left];
    Symbol& right = symbols[pair.right];
    if (left.length == 0 || right.length == 0 || left.length + right.length != pair.length) continue;
    left.length = pair.length;
    left.id = pair.id;
    left.next = right.next;
    right.length = 0;
    if (left.next >= 0) symbols[left.next].prev = pair.left;
    offer(left.prev, pair.left);
    offer(pair.left, left.next);
  }

  for (int32_t i = 0; i >= 0; i = symbols[i].next) {
    const Symbol& symbol = symbols[i];
    if (symbol.id >= 0) {
      ids.push_back(symbol.id);
      continue;
    }
    for (uint32_t k = 0; k < symbol.length; ++k) {
      const int32_t byte = byte_id_[static_cast<uint8_t>(escaped[symbol.start + k])];
      if (byte < 0) {
        // Without a full set of byte tokens the character is unknown as a whole.
        ids.resize(ids.size() - k);
        if (unknown_id_ >= 0) ids.push_back(unknown_id_);
        break;
      }
      ids.push_back(byte);
    }
  }
}

}  // namespace fourfold::text
