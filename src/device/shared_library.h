// Libraries of C functions that are looked for at run time: a program that does not ask for them needs none.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace zeroth::detail {

/// What is looked for, and where.
struct LibraryQuery {
  std::string where{};               ///< of errors: "device.cuda"
  std::string what{};                ///< "NCCL"
  std::vector<std::string> names{};  ///< files, best first: "libnccl.so.2"
  std::string variable{};            ///< of the environment: a path that is taken instead of the names
  std::string probe{};               ///< a function that every version has: who has it, has the library
  std::string hint{};                ///< of the error when there is none
};

/// One loaded library; stays for the rest of the process.
class SharedLibrary {
 public:
  /// The one that this process has already, whoever loaded it: its functions are global symbols (a program that is
  /// linked with it), or a file of one of `names` is loaded. Else that of the variable, else the names as the dynamic
  /// linker finds them. Throws kEnvironment with what each place said; also where the variable names another file than
  /// the one that is loaded, since two copies of one library in a process do not know of each other.
  [[nodiscard]] static SharedLibrary open(const LibraryQuery& query);

  /// File that the probe is in.
  [[nodiscard]] const std::string& file() const { return file_; }

  /// Sets `function`; a missing one is null if it is `optional`, else a kEnvironment that names it.
  template <class Function>
  void find(Function*& function, const char* name, bool optional = false) const {
    function = reinterpret_cast<Function*>(address(name, optional));
  }

 private:
  [[nodiscard]] void* address(const char* name, bool optional) const;

  std::string where_;
  std::string what_;
  std::string file_;
  void* handle_ = nullptr;
};

}  // namespace zeroth::detail
