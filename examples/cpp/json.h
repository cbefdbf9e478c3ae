// JSON as RFC 8259 defines it. Strict: what is nested deeper than 64, or has a key twice, is refused.

#pragma once

#include <charconv>
#include <cstdint>
#include <set>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

struct Json {
    enum Kind { Null, Boolean, Number, String, Array, Object } kind = Null;
    std::string text;               // of a number or a string; "true" or "false"
    std::vector<Json> items;        // of an array; the values of an object
    std::vector<std::string> keys;  // of an object

    const Json* find(std::string_view key) const {
        for (size_t i = 0; i < keys.size(); ++i)
            if (keys[i] == key) return &items[i];
        return nullptr;
    }
};

class JsonReader {
  public:
    explicit JsonReader(std::string_view text) : text_(text) {}

    Json read() {
        Json value = read_value(0);
        if (peek() != '\0' || at_ != text_.size()) fail("the end");
        return value;
    }

  private:
    [[noreturn]] void fail(const char* expected) const {
        throw std::runtime_error("no JSON: " + std::string(expected) + " expected at byte " +
                                 std::to_string(at_));
    }

    // The next character that is no space; zero at the end.
    char peek() {
        while (at_ < text_.size() && std::string_view(" \t\r\n").find(text_[at_]) != std::string_view::npos)
            ++at_;
        return at_ < text_.size() ? text_[at_] : '\0';
    }

    bool take(char wanted) {
        if (peek() != wanted) return false;
        ++at_;
        return true;
    }

    Json read_value(int depth) {
        if (depth > 64) fail("less depth");
        switch (peek()) {
            case '{':
                return read_items(Json::Object, '}', depth);
            case '[':
                return read_items(Json::Array, ']', depth);
            case '"':
                return {Json::String, read_string(), {}, {}};
            case 't':
                return read_word(Json::Boolean, "true");
            case 'f':
                return read_word(Json::Boolean, "false");
            case 'n':
                return read_word(Json::Null, "null");
            default:
                return read_number();
        }
    }

    Json read_items(Json::Kind kind, char end, int depth) {
        Json list{kind, {}, {}, {}};
        std::set<std::string> known;
        ++at_;
        if (take(end)) return list;
        do {
            if (kind == Json::Object) {
                if (peek() != '"') fail("a key");
                list.keys.push_back(read_string());
                if (!known.insert(list.keys.back()).second) fail("another key");
                if (!take(':')) fail("':'");
            }
            list.items.push_back(read_value(depth + 1));
        } while (take(','));
        if (!take(end)) fail(kind == Json::Object ? "',' or '}'" : "',' or ']'");
        return list;
    }

    Json read_word(Json::Kind kind, std::string_view word) {
        if (text_.substr(at_, word.size()) != word) fail("a value");
        at_ += word.size();
        return {kind, std::string(word), {}, {}};
    }

    Json read_number() {
        const size_t begin = at_;
        const auto digits = [this] {
            const size_t first = at_;
            while (at_ < text_.size() && text_[at_] >= '0' && text_[at_] <= '9') ++at_;
            if (at_ == first) fail("a value");
        };
        const auto follows = [this](std::string_view any) {
            const bool found = at_ < text_.size() && any.find(text_[at_]) != std::string_view::npos;
            at_ += found;
            return found;
        };
        follows("-");
        if (!follows("0")) digits();
        if (follows(".")) digits();
        if (follows("eE")) {
            follows("+-");
            digits();
        }
        return {Json::Number, std::string(text_.substr(begin, at_ - begin)), {}, {}};
    }

    std::string read_string() {
        std::string result;
        ++at_;
        for (;;) {
            if (at_ >= text_.size() || static_cast<unsigned char>(text_[at_]) < 0x20) fail("'\"'");
            const char c = text_[at_++];
            if (c == '"') return result;
            if (c != '\\') {
                result += c;
                continue;
            }
            const char escape = at_ < text_.size() ? text_[at_++] : '\0';
            static constexpr std::string_view escapes = "\"\\/bfnrt", meanings = "\"\\/\b\f\n\r\t";
            if (escape == 'u') {
                append_utf8(result, read_code_point());
            } else if (const size_t i = escapes.find(escape); i != std::string_view::npos) {
                result += meanings[i];
            } else {
                fail("an escape");
            }
        }
    }

    uint32_t read_code_point() {
        const uint32_t first = read_four_digits();
        if (first < 0xD800 || first > 0xDFFF) return first;
        if (first > 0xDBFF || text_.substr(at_, 2) != "\\u") fail("a pair of surrogates");
        at_ += 2;
        const uint32_t second = read_four_digits();
        if (second < 0xDC00 || second > 0xDFFF) fail("a pair of surrogates");
        return 0x10000 + ((first - 0xD800) << 10) + (second - 0xDC00);
    }

    uint32_t read_four_digits() {
        uint32_t number = 0;
        const std::string_view digits = text_.substr(at_, 4);
        const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), number, 16);
        if (digits.size() != 4 || error != std::errc() || end != digits.data() + 4) fail("four digits");
        at_ += 4;
        return number;
    }

    static void append_utf8(std::string& text, uint32_t code) {
        if (code < 0x80) {
            text += static_cast<char>(code);
        } else if (code < 0x800) {
            text += static_cast<char>(0xC0 | code >> 6);
            text += static_cast<char>(0x80 | (code & 0x3F));
        } else {
            text += static_cast<char>(code < 0x10000 ? 0xE0 | code >> 12 : 0xF0 | code >> 18);
            if (code >= 0x10000) text += static_cast<char>(0x80 | (code >> 12 & 0x3F));
            text += static_cast<char>(0x80 | (code >> 6 & 0x3F));
            text += static_cast<char>(0x80 | (code & 0x3F));
        }
    }

    std::string_view text_;
    size_t at_ = 0;
};
