// As much of JSON as manifests have: objects, lists, strings, integers; true, false, null and fractions are refused.
#ifndef TVM_DECONV_DETAIL_JSON_HPP_
#define TVM_DECONV_DETAIL_JSON_HPP_

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "../error.hpp"

namespace tvm_deconv::detail {

struct Json {
  enum class Kind { object, list, text, integer } kind = Kind::integer;
  std::map<std::string, Json> fields;
  std::vector<Json> items;
  std::string text;
  std::int64_t integer = 0;
};

class JsonReader {
 public:
  explicit JsonReader(std::string_view text) : text_(text) {}

  Json read() {
    Json value = any(0);
    skip();
    if (at_ != text_.size()) fail("something follows its end");
    return value;
  }

 private:
  [[noreturn]] static void fail(const char* why) { throw Error(std::string("must be JSON: ") + why); }

  void skip() {
    while (at_ < text_.size() && std::string_view(" \t\r\n").find(text_[at_]) != std::string_view::npos) ++at_;
  }

  char next() {
    if (at_ == text_.size()) fail("it ends too soon");
    return text_[at_++];
  }

  bool took(char wanted) {
    skip();
    if (at_ == text_.size() || text_[at_] != wanted) return false;
    ++at_;
    return true;
  }

  Json any(int depth) {
    if (depth > 16) fail("it is too deep");
    Json value;
    if (took('{')) {
      value.kind = Json::Kind::object;
      for (bool first = true; !took('}'); first = false) {
        if (!first && !took(',')) fail("a comma is missing");
        if (!took('"')) fail("a name is missing");
        const std::string name = string();
        if (!took(':')) fail("a colon is missing");
        if (!value.fields.emplace(name, any(depth + 1)).second) fail("a field appears twice");
      }
    } else if (took('[')) {
      value.kind = Json::Kind::list;
      for (bool first = true; !took(']'); first = false) {
        if (!first && !took(',')) fail("a comma is missing");
        value.items.push_back(any(depth + 1));
      }
    } else if (took('"')) {
      value.kind = Json::Kind::text;
      value.text = string();
    } else {
      value.integer = number();
    }
    return value;
  }

  std::int64_t number() {
    const bool negative = took('-');
    std::int64_t value = 0;
    int digits = 0;
    for (; at_ < text_.size() && text_[at_] >= '0' && text_[at_] <= '9'; ++at_, ++digits) {
      if (digits == 18) fail("an integer is too large");
      value = 10 * value + (text_[at_] - '0');
    }
    if (!digits) fail("a value is none that manifests have");
    return negative ? -value : value;
  }

  std::string string() {
    std::string value;
    for (char c = next(); c != '"'; c = next()) {
      if (static_cast<unsigned char>(c) < ' ') fail("a string has a control character");
      if (c != '\\') {
        value += c;
        continue;
      }
      static constexpr std::string_view short_forms = "\"\\/bfnrt", meant = "\"\\/\b\f\n\r\t";
      const char form = next();
      const std::size_t which = short_forms.find(form);
      if (which != std::string_view::npos)
        value += meant[which];
      else if (form == 'u')
        value += escaped();
      else
        fail("a string has an unknown escape");
    }
    return value;
  }

  // A character of four hexadecimal digits, as UTF-8; halves of pairs are written as they are.
  std::string escaped() {
    unsigned code = 0;
    for (int i = 0; i < 4; ++i) {
      const std::size_t digit = std::string_view("0123456789abcdefABCDEF").find(next());
      if (digit == std::string_view::npos) fail("an escape has no four digits");
      code = 16 * code + static_cast<unsigned>(digit < 16 ? digit : digit - 6);
    }
    std::string bytes;
    if (code < 0x80) {
      bytes += static_cast<char>(code);
    } else {
      if (code >= 0x800) bytes += static_cast<char>(0xe0 | code >> 12);
      bytes += static_cast<char>((code < 0x800 ? 0xc0 : 0x80) | (code >> 6 & (code < 0x800 ? 31u : 63u)));
      bytes += static_cast<char>(0x80 | (code & 63));
    }
    return bytes;
  }

  std::string_view text_;
  std::size_t at_ = 0;
};

}  // namespace tvm_deconv::detail

#endif  // TVM_DECONV_DETAIL_JSON_HPP_
