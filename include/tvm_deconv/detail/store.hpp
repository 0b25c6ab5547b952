// Where artifacts lie: a directory, or a file that "tvm-deconv pack" made of one.
#ifndef TVM_DECONV_DETAIL_STORE_HPP_
#define TVM_DECONV_DETAIL_STORE_HPP_

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <map>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

#include "../error.hpp"

namespace tvm_deconv::detail {

class Store {
 public:
  // Opens the directory or file at `path`. Throws Error.
  explicit Store(std::string path) : path_(std::move(path)) {
    std::error_code none;
    archive_ = !std::filesystem::is_directory(path_, none);
    if (archive_) read_table();
  }

  const std::string& path() const { return path_; }

  // The names in it, sorted.
  std::vector<std::string> names() const {
    std::vector<std::string> found;
    if (archive_) {
      for (const auto& [name, _] : members_) found.push_back(name);
    } else {
      std::error_code error;
      std::filesystem::directory_iterator entry(path_, error);
      for (; !error && entry != std::filesystem::directory_iterator(); entry.increment(error))
        found.push_back(entry->path().filename());
      if (error) throw Error(path_ + ": must be a directory that can be read: " + error.message());
    }
    std::sort(found.begin(), found.end());
    return found;
  }

  // The content of a file in it, of at most `limit` bytes. Throws Error.
  std::string read(const std::string& name, std::uint64_t limit) const {
    const std::string place = path_ + "/" + name;
    if (!archive_) {
      const std::uint64_t size = size_of(place);  // before it is opened: a pipe would wait for a writer
      std::ifstream file(place, std::ios::binary);
      return content(file, place, size, limit);
    }
    const auto member = members_.find(name);
    if (member == members_.end()) throw Error(place + ": is no member of the file");
    std::ifstream file(path_, std::ios::binary);
    file.seekg(static_cast<std::streamoff>(member->second.header));
    const std::string header = content(file, place, 30, 30);
    if (header.substr(0, 4) != "PK\3\4") throw Error(place + ": is not where the table of the file says");
    file.seekg(static_cast<std::streamoff>(number(header, 26, 2) + number(header, 28, 2)), std::ios::cur);
    std::string bytes = content(file, place, member->second.size, limit);
    if (checksum(bytes) != member->second.checksum) throw Error(place + ": its bytes are not those that were written");
    return bytes;
  }

 private:
  struct Member {
    std::uint64_t header, size, checksum;
  };

  // The size of a regular file. Throws Error.
  static std::uint64_t size_of(const std::string& path) {
    std::error_code error;
    if (!std::filesystem::is_regular_file(path, error)) throw Error(path + ": must be a regular file");
    const std::uint64_t size = std::filesystem::file_size(path, error);
    if (error) throw Error(path + ": must be a regular file: " + error.message());
    return size;
  }

  static std::uint64_t number(std::string_view bytes, std::size_t at, std::size_t count) {
    std::uint64_t value = 0;
    while (count--) value = value << 8 | static_cast<unsigned char>(bytes[at + count]);
    return value;
  }

  static std::string content(std::ifstream& file, const std::string& place, std::uint64_t size, std::uint64_t limit) {
    if (size > limit) throw Error(place + ": must be at most " + std::to_string(limit) + " bytes");
    std::string bytes(static_cast<std::size_t>(size), '\0');
    if (!file.read(bytes.data(), static_cast<std::streamsize>(size))) throw Error(place + ": must be readable, whole");
    return bytes;
  }

  static std::uint64_t checksum(std::string_view bytes) {  // CRC-32
    std::uint32_t sum = ~0u;
    for (char byte : bytes) {
      sum ^= static_cast<unsigned char>(byte);
      for (int bit = 0; bit < 8; ++bit) sum = sum >> 1 ^ (sum & 1 ? 0xedb88320u : 0u);
    }
    return static_cast<std::uint32_t>(~sum);
  }

  // Reads the table of the archive: its comment, which comes last, has a known length.
  void read_table() {
    static constexpr std::string_view comment = "tvm_deconv artifacts, format 1";
    static constexpr std::uint64_t most = 1u << 26;
    const auto refuse = [&](const char* why) {
      throw Error(path_ + ": must be a directory of artifacts, or a whole file that tvm-deconv pack wrote, but " + why);
    };
    std::error_code none;
    if (!std::filesystem::is_regular_file(path_, none)) refuse("there is none");
    const std::uint64_t size = size_of(path_), end_size = 22 + comment.size();
    std::ifstream file(path_, std::ios::binary);
    if (size < end_size + 4 || content(file, path_, 4, 4) != "PK\3\4") refuse("it does not begin as one");
    file.seekg(static_cast<std::streamoff>(size - end_size));
    const std::string end = content(file, path_, end_size, end_size);
    if (end.substr(0, 4) != "PK\5\6" || end.substr(22) != comment) refuse("it was truncated, or another version wrote it");
    const std::uint64_t count = number(end, 10, 2), length = number(end, 12, 4), start = number(end, 16, 4);
    if (count == 0xffff || start == 0xffffffff) refuse("it is larger than 4 GB, which this loader does not read");
    if (start + length != size - end_size) refuse("its table is not before its end");
    file.seekg(static_cast<std::streamoff>(start));
    const std::string table = content(file, path_, length, most);
    std::size_t at = 0;
    for (std::uint64_t entry = 0; entry < count; ++entry) {
      if (at + 46 > table.size() || table.compare(at, 4, "PK\1\2") != 0) refuse("its table is damaged");
      const std::uint64_t name_length = number(table, at + 28, 2);
      const std::uint64_t following = at + 46 + name_length + number(table, at + 30, 2) + number(table, at + 32, 2);
      if (following > table.size()) refuse("its table is damaged");
      const std::string name = table.substr(at + 46, name_length);
      if (number(table, at + 8, 2) & 1 || number(table, at + 10, 2)) refuse("a member is compressed or encrypted");
      if (name.empty() || name.size() > 255 || name.find_first_of(std::string_view("/\\\0", 3)) != std::string::npos)
        refuse("a member has no plain file name");
      const Member member{number(table, at + 42, 4), number(table, at + 24, 4), number(table, at + 16, 4)};
      if (!members_.emplace(name, member).second) refuse("two of its members have one name");
      at = static_cast<std::size_t>(following);
    }
  }

  std::string path_;
  bool archive_ = false;
  std::map<std::string, Member> members_;
};

}  // namespace tvm_deconv::detail

#endif  // TVM_DECONV_DETAIL_STORE_HPP_
