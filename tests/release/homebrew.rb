# Stands in for Homebrew: reads a formula, runs its install in a folder, and prints as JSON what it says and does.
#   usage: ruby homebrew.rb FORMULA FOLDER
require "fileutils"
require "json"
require "pathname"

FOLDER = Pathname(ARGV[1])

module Language
  module Python
    module Virtualenv
      def virtualenv_create(root, python, system_site_packages:)
        log << ["virtualenv", root.to_s, python, system_site_packages]
      end
    end
  end
end

class Fetched
  def initialize(name, &block)
    @found = { "name" => name }
    instance_eval(&block)
  end

  def url(value = nil, using: nil)
    return @found["url"] unless value

    @found.update("url" => value, "using" => using.to_s)
  end

  def sha256(value)
    @found["sha256"] = value
  end

  def cached_download # as Homebrew names files in its cache
    path = FOLDER/"cache"/"#{@found["sha256"]}--#{File.basename(url)}"
    path.write(@found["name"])
    path
  end

  def to_h
    @found
  end
end

class Formula
  include FileUtils

  SAID = Hash.new { |said, word| said[word] = [] }
  RESOURCES = []

  class << self
    %i[desc homepage url version sha256 license depends_on preserve_rpath run keep_alive log_path
       error_log_path].each do |word|
      define_method(word) { |*values, **named| SAID[word] << [*values.flatten.map(&:to_s), *named.map { |pair| pair.join("=") }] }
    end

    def resource(name, &block) = RESOURCES << Fetched.new(name, &block)

    def service(&block) = instance_eval(&block)

    def test(&block) = define_method(:test, &block)

    def opt_bin = Pathname("/opt/bin")

    def var = Pathname("/var")

    def inherited(formula)
      super
      @@formula = formula
    end
  end

  attr_reader :log

  def initialize
    @log = []
  end

  def resources = RESOURCES

  def version = SAID[:version].first.first

  def system(*command) = log << command.map(&:to_s)

  def shell_output(command) = log << ["shell", command]

  def assert_match(*) = nil

  def buildpath = FOLDER/"build"

  def libexec = Place.new("libexec", log)

  %i[bin man1 bash_completion zsh_completion fish_completion].each do |name|
    define_method(name) { Place.new(name.to_s, log) }
  end

  def self.formula = @@formula
end

class Place
  def initialize(path, log)
    @path = path
    @log = log
  end

  def /(other) = Place.new("#{@path}/#{other}", @log)

  def to_s = @path

  def install_symlink(target) = @log << ["symlink", @path, target.to_s]
end

load ARGV[0]
formula = Formula.formula.new
formula.install
formula.test
puts JSON.generate("said" => Formula::SAID, "resources" => Formula::RESOURCES.map(&:to_h), "done" => formula.log)
