// SentencePiece-style tokenization: merge the best-scored neighbours until nothing merges, bytes for the
// rest.
//
// The segmentation is that of SentencePiece's BPE mode (Kudo and Richardson 2018): characters are merged pair
// by pair, highest score first and leftmost among equals. A heap of candidate pairs over a doubly linked list
// of symbols makes it O(n log n) in the characters of the text.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace fourfold::text {

// Values of tokenizer.ggml.token_type.
enum class TokenType : uint8_t {
  kUndefined = 0,
  kNormal = 1,
  kUnknown = 2,
  kControl = 3,
  kUserDefined = 4,
  kUnused = 5,
  kByte = 6,
};

// Token texts, one after the other: token i is bytes [offset[i], offset[i + 1]).
class TokenTexts {
 public:
  void reserve(size_t tokens, size_t bytes);
  void add(std::string_view text);
  size_t size() const { return offset_.size() - 1; }
  std::string_view operator[](size_t id) const {
    return std::string_view(bytes_).substr(offset_[id], offset_[id + 1] - offset_[id]);
  }

 private:
  std::string bytes_;
  std::vector<size_t> offset_{0};
};

// Finds tokens that are matched in the text before any merging: leftmost first, longest among those.
class SpecialTrie {
 public:
  struct Match {
    size_t length = 0;
    int32_t token = -1;
  };

  SpecialTrie();
  void add(std::string_view text, int32_t token);
  // The longest token that starts at text[0] and that `allowed` accepts; token is -1 if there is none.
  template <class Allowed>
  Match longest(std::string_view text, Allowed allowed) const {
    Match best;
    int32_t node = 0;
    for (size_t i = 0; i < text.size(); ++i) {
      node = child(node, static_cast<uint8_t>(text[i]));
      if (node < 0) break;
      const int32_t token = nodes_[node].token;
      if (token >= 0 && allowed(token)) best = {i + 1, token};
    }
    return best;
  }

 private:
  // Children of a node form a list through `next`; the root, which every byte of a text visits, has a table.
  struct Node {
    int32_t first = -1;
    int32_t next = -1;
    int32_t token = -1;
    uint8_t byte = 0;
  };
  int32_t child(int32_t node, uint8_t byte) const {
    if (node == 0) return root_[byte];
    for (int32_t c = nodes_[node].first; c >= 0; c = nodes_[c].next) {
      if (nodes_[c].byte == byte) return c;
    }
    return -1;
  }

  std::vector<Node> nodes_;
  int32_t root_[256];
};

class SpmTokenizer {
 public:
  // scores and types: one per token. add_space_prefix: a space goes before the text's beginning and after
  // each special token. strip_after: tokens that swallow the white space to their right. Texts, scores and
  // types must have the same size, which the caller has checked.
  SpmTokenizer(TokenTexts texts, std::vector<float> scores, std::vector<TokenType> types, int32_t unknown_id,
               bool add_space_prefix, const std::vector<int32_t>& strip_after);

  // Appends the ids of `text` (valid UTF-8). Control tokens written out in the text become their ids if
  // parse_special, otherwise they are plain text; user-defined tokens are always matched.
  void encode(std::string_view text, bool parse_special, std::vector<int32_t>& ids) const;

 private:
  void merge(std::string_view text, bool space_prefix, std::vector<int32_t>& ids) const;
  int32_t find(std::string_view text) const;

  TokenTexts texts_;
  std::vector<float> scores_;
  std::vector<TokenType> types_;
  std::vector<bool> strip_after_;
  // Open addressing, linear probing; a slot holds the upper half of the hash and the id, or id -1.
  struct Slot {
    uint32_t tag;
    int32_t id;
  };
  std::vector<Slot> slots_;
  size_t slot_mask_ = 0;
  size_t longest_ = 0;  // bytes of the longest token that merging can make
  int32_t byte_id_[256];
  int32_t unknown_id_;
  bool add_space_prefix_;
  SpecialTrie special_;
};

}  // namespace fourfold::text
